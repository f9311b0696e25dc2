"""Models behind servers: one client for vLLM, SGLang and everybody's chat endpoints."""

from vocagnolm.model.served.engines import WriteRequest, Written
from vocagnolm.model.served.fleet import Server
from vocagnolm.model.served.model import SERVER_REQUEST_TOKENS, ServedModel

__all__ = ["SERVER_REQUEST_TOKENS", "ServedModel", "Server", "WriteRequest", "Written"]
