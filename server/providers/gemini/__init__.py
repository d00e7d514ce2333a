"""Google's Gemini: the streamed `generateContent` of the Developer API, through the SDK google-genai.

Special: a signature is a member of the part that it signs, and only the calls of the current turn must have theirs. A
call arrives whole; parallel calls may arrive in several chunks. Ids of calls may be missing and are then made here. All
results of a step are sent back in one content, in the order of the calls. The stream has no end marker, only a finish
reason. Explicit caches (`caches`) exist only here.
"""
