"""The gateway, which accepts requests, stores them as jobs, tracks the fleet, and assigns the jobs to workers.

A request comes in through `api`, becomes a job in `jobs`, waits in `scheduling`, and is given to a worker of the
`fleet` by `dispatch`. ControlNets, LoRAs and the other features of requests are in bottega.addons.

What happens when something dies is described where the state is kept: for a job in jobs/job.py, for a service in
fleet/registry.py, for the gateway in gateway.py, for an attempt in worker/attempts.py, for a worker's engine in
worker/engine. Every message between these processes may be lost, duplicated or late: receiving one again is safe, and
an outdated one changes nothing.
"""
