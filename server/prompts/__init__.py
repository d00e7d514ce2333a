"""Jinja: prompts from templates, in a sandbox.

The room owns the templates of the layers, which are files of the operator and are rendered in this process, and the
confined worker processes. Everything from the network is parsed, checked, rendered and evaluated there: the
instructions of an assistant, the templates of a replay's candidate, and assertions. A worker has no secrets, little
memory, and a time limit after which the kernel ends it. Both sides use the same `environment`. The room promises that
the input of a user is always a value and never a template, and that no template can harm the server.

Other rooms use these modules:

- `renderer`: `JinjaRenderer`, which implements the renderer port
- `templates`: `load_templates`, which reads the templates of the layers
- `assertions`: `ConfinedAssertions`, which evaluates the assertions of replays
- `worker_pool`: `WorkerPool`, the worker processes shared by all tenants, and `RenderLimits`
"""
