"""Which worker gets which job, and when: the controller that reacts to what happens, the scheduler that looks at the
queue, the policy that decides, and what follows from the outcome of an attempt.
"""
