"""Webhooks: the gateway announces the end of a job by a signed POST to a URL of its request or its tenant.

- `events`: makes the event of a job's end, which the job store writes with it
- `lanes`: decides which event is delivered next, so that no receiver delays another tenant's
- `delivery`: delivers, repeats what failed, and gives up what failed for too long; operators list and replay the rest
"""
