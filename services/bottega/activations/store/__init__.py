"""What the store does with activations: questions are answered (answers), recordings taken in (intake) and templates
evicted in a thread of its own (writer, insertion), over one table of the templates; `ActivationStore` is all of it.
"""
