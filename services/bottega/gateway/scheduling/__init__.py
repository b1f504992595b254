"""Scheduling: which worker gets which job, and when.

The controller reacts to events, the scheduler goes through the queue, and the policy chooses the worker. `outcomes`
decides whether a job is retried or ends after a failed attempt.
"""
