"""The logic of the activation store: `ActivationStore` and its parts.

`answers` answers questions, and `recordings` receives sections. One thread writes recordings and evicts templates, in
`writer` and `insertion`.
"""
