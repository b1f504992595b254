"""The disk of an activation store: section files by digest, template records in SQLite, and profiles as files."""
