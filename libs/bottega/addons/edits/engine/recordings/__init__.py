"""Recordings of templates: block outputs outside the mask, their readers and writers, and where they are kept."""
