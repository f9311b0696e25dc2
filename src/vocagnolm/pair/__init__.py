"""A student and its teacher over some text, before anything is trained."""
