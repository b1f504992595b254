"""What the activation store has on its disk: sections as files by digest, records of templates in SQLite, and profiles
of models' blocks as files.
"""
