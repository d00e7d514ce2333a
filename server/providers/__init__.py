"""Providers: the port to a vendor, what models support and cost, and the loop that makes a call with its retries.

`provider` is the port, `calls` the loop, `model_profile` and `pricing` the data, `call_slots` the limit on concurrent
calls. `wire` records every byte of every response. `gemini` and `anthropic` implement the port with the same files and
functions, and are the only packages that import the SDKs. The modules of this package itself do no I/O.
"""
