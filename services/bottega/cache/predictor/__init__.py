"""The match predictor: it predicts whether a search would find nothing, with a one-class model of each key's entries.

It is used as long as it saves more time than it costs.
"""
