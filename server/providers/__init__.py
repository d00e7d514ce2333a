"""Providers: the port to a vendor, what models support and cost, and the loop that makes a call with its retries.

The room owns everything that depends on a vendor. It promises that every byte of every response is recorded, that a
failure is always a `ProviderFailed`, and that a request is repeated only if that is safe. The modules of this package
itself do no I/O. Inside, `wire` is the recording transport; `gemini` and `anthropic` implement the port with the same
files and functions, and are the only packages that import the SDKs.

Other rooms use these modules:

- `provider`: the port, `Provider`, and the stream of one call
- `calls`: `RetryingCall`, the loop, with `retry_policy` for its limits and `call_slots` for concurrent calls
- `continuation`: answers that took more than one call
- `choice`, `model_name`: the provider of a command, and valid names of models
- `model_profile`, `pricing`, `token_estimate`: what models support, what they cost, and estimates of tokens
- `retry_policy`, `call_slots`: see `calls`
- `wire`, `gemini`, `anthropic`: the implementations, which `server.app` assembles
"""
