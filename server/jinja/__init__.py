"""Jinja: prompts from templates, in a sandbox.

The layers' templates are files of whoever runs the server (`templates`) and are rendered in this process. The
instructions of an assistant come over the network; they are rendered and checked in a process of its own (`worker`, and
`worker_process` on this side of the pipe) that has no secrets, little memory, and a parent that kills it when it takes
too long. Both use the same `environment`. What a user types is a value to either, and never a template.
"""
