"""The logic of the activation store, in `ActivationStore`, over one table of the templates.

`answers` answers queries, and `recordings` receives sections. One thread writes recordings and evicts
templates, in `writer` and `insertion`.
"""
