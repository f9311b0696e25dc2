"""`vocagnolm demo` and its material: a small math corpus with web-like noise, two different
tokenizers and a small teacher. All of it belongs to this project and is generated from a seed."""
