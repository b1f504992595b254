"""The gateway: accepts requests, keeps their jobs, knows the fleet, and gives the jobs to workers.

A request comes in through `api`, becomes a job in `jobs`, waits in `scheduling`, and is given to a worker of the
`fleet` by `dispatch`. `addons` are what a request may have beside its model.

What happens when something dies is described where the state is kept: of a job in jobs/job.py, of a service in
fleet/registry.py, of the gateway in gateway.py, of an attempt in worker/attempts.py, of a worker's engine in
worker/engine. Every message between them may be lost, doubled or late: each is safe to receive again, and one that does
not count any more changes nothing.
"""
