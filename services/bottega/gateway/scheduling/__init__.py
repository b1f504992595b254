"""Scheduling: which worker gets which job, and when.

The controller reacts to events, the scheduler goes through the queue, and the policy chooses the worker. After a failed
attempt, `outcomes` decides whether the job is retried or ends.
"""
