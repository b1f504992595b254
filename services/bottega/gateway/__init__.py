"""The gateway: takes orders, keeps their jobs, knows the fleet, and brings the two together.

What is what when things die, on one page. Each part is a small state machine that its module keeps, and every
message between them may be lost, doubled or late: each is safe to hear again, and one that counts no more changes
nothing.

A job (jobs/job.py; durable: jobs/store/record.py; what follows from an attempt: scheduling/outcomes.py).
A number fences every attempt; only the newest is listened to.

    state      what happens                                     next
    queued     a worker is free for it (scheduling/policy.py)           running, with the next number
               its deadline passes, or cannot be met any more   failed (jobs/deadlines.py, scheduling/estimates.py)
               no worker of its model within the grace          failed: NO_WORKER
               nobody hosts a ControlNet of it, for the grace   failed: NO_CONTROLNET
    running    progress, checkpoint of the newest attempt       running
               all images of it came, and are stored            completed
               the worker says that it cannot be drawn          failed
               the worker did not take it, or gives it back     queued, first; the worker rests; 60 times a worker
               the worker reaches no server of a ControlNet     queued, first; these servers rest; as often
               the worker is cut off                            queued, first; max_attempts times
               the worker died, others beside it                queued, first; a suspect
               the worker died, and it was alone there          queued, first; a suspect; the second time
                                                                failed: POISONED
    live       somebody cancels                                 cancelled; its attempt is stopped
    ended      anything                                         as it is

A suspect runs alone: it takes an idle worker, or has one cleared; nobody joins it until it has ended or got further
than it was at the death. A suspect that was cleared so and sees another death stays one until its end. So a job meets
at most two deaths beside others, nobody fails for a neighbour's sake, and what kills is out after two more.

An attempt, as the worker holds it (worker/attempts.py, worker/attempt_runner.py)

    accepted   the engine begins                                running
    running    images are encoded                               completed
    live       CancelAttempt, or a higher number of the job     dropped, in the engine too
               its engine dies or hangs                         failed: WORKER_LOST, with what died beside it
               its deadline passes                              failed: DEADLINE_PASSED
    ended      RunAttempt of the same number                    told again, until the grace is over or room is needed
               anything else                                    as it is

A worker, as the gateway sees it (fleet/registry.py). Its lease is renewed by every report.

    unknown    Join                                             here: it gets jobs; attempts that count no more are
                                                                stopped on its reports
    here       it says that it drains                           finishing: it keeps what runs and gets nothing
               its stream ends                                  away: it keeps what runs and gets nothing
               silence for the lease                            lost: what ran there is cut off
               a call of it breaks that it had begun to answer  that attempt's worker died; or was cut off, where it
                                                                answers that it still has the attempt
               a call of it breaks before                       that attempt was cut off, or not taken
    away       Join with the same registration                  here
               silence for the lease                            lost
    lost       Join                                             here, as a new one

A worker's engine (worker/engine_client.py): starting, ready, dead. No word for hang_s, or no step for stall_s with work
there, is death. A worker whose engine is dead is not in the fleet.

The gateway (gateway.py). A tick that is late renews all leases: whoever was itself late declares nobody dead.

    starting   the store is open                                serving
    serving    SIGTERM                                          draining: nothing new, what runs may end in the grace
    draining   the rest has ended, or the grace is over         stopped; what is left is in the store
    dead       started again                                    starting; live jobs are queued again, and those that ran
                                                                are held a moment for the worker that still has them
                                                                (scheduling/recovery.py), and go on there even later,
                                                                unless they were begun anew; numbers carry the life, so
                                                                that those of an earlier one are never given again
    serving    the disk cannot be written                       paused: nothing is taken or handed out; what was drawn
                                                                is kept, and written when it is back (jobs/storage.py)
"""
