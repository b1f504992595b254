"""The features beside plain pictures, a package each: all of a feature's code but its server.

Its `engine` runs in the process of a worker's engine, with torch; nothing else in it imports torch.
"""
