"""The match predictor: whether a search of the index would find nothing, by a one-class model of each key's entries,
used while that spares more time than it costs.
"""
