"""`vocagnolm try`: is a teacher worth using? A verdict in minutes, on a sample.

`text.py` tries a teacher that reads a corpus, `prompts.py` one that writes the answers to prompts.
Read `try_text` or `try_prompts` from top to bottom. Measured speeds decide once how much fits into
the minutes; that plan is the first thing kept in the folder, so that an interrupted try takes the
same samples when it is run again, and ends with the same models.
"""
