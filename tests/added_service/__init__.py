"""A service that is no part of Bottega: it keeps colours, which jobs that name them in their prompt will need.

It shows, and the test beside it proves, what a new service takes: this package, and one line of a manifest.
"""
