"""`vocagnolm demo` and its material: a small math corpus with web-like noise, two unlike tokenizers
and a small teacher. Everything is the project's own and is made from a seed."""
