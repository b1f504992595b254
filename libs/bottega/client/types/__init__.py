"""Values of the SDK, such as options, events, pictures and jobs, and their conversion to and from messages."""
