"""Recordings of templates: block outputs, their readers and writers, and where they are kept."""
