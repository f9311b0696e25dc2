"""A teacher behind a socket: vLLM, SGLang. Token ids out, losses back."""

from vocagnolm.score.server.teacher import ServerTeacher

__all__ = ["ServerTeacher"]
