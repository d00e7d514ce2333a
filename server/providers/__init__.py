"""Providers: the port to a vendor, what models support and cost, and the one loop that makes a call with its retries.

`provider` is the port, `calls` the loop, `model_profile` and `pricing` the data, `call_slots` the limit on simultaneous
calls. `wire` keeps every byte of every answer; `gemini` and `anthropic` implement the port, with the same files and
functions, and are the only ones that import their SDKs. The modules of this package itself do no I/O.
"""
