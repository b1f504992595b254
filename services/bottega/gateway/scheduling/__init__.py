"""Scheduling: which worker gets which job, and when.

The controller reacts to events, the scheduler looks at the queue, and the policy decides; outcomes says what follows
from how an attempt ends.
"""
