"""The scaler: starts and stops workers and ControlNet servers of one host, as the gateway's forecast asks for.

`pools` decides which instance starts or stops next, and `units` starts and stops it, by systemd or as a child process.
"""
