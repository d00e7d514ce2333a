"""From turns to a request: history rules and repairs, the four layers in order, prompt arguments, build and rebuild.

`preparation` loads a conversation and builds its next payload, `builder` does so purely and can rebuild any past one to
the byte, `history` has the rules and `withholding` says which signatures stay out. The same values give the same bytes.
"""
