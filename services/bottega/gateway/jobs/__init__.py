"""Jobs of the gateway.

`job` defines the states of a job, `repository` finds jobs in memory and on the disk, `stored_jobs` lists and deletes
those on the disk, `store` is the database of jobs, and `storage` watches the disk and writes the changes of each job in
order. This package imports no other package of the gateway.
"""
