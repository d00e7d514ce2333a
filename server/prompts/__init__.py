"""Jinja: prompts from templates, in a sandbox.

The layers' templates are files of whoever runs the server (`templates`) and are rendered in this process. Whatever came
over the network is parsed, checked and rendered in processes of its own: the instructions of an assistant and the
templates of a replay's candidate. Such a process (`worker`, and `worker_process` on this side of the pipe) has no
secrets, little memory, and a limit of time after which the kernel ends it. `worker_pool` has a few of them and shares
them fairly between tenants. Both sides use the same `environment`. What a user types is a value to either, and never a
template.
"""
