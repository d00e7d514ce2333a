"""Google's Gemini through google-genai: `generateContent` of the Developer API, streamed.

Special here: a signature is a sibling of what it signs within a part, and only the calls of the current turn must have
theirs; a call arrives whole, parallel calls may come in several chunks; ids may be missing and are made; all results
of a step go back in one content, in the order of the calls; a stream has no end marker but a finish reason.
"""
