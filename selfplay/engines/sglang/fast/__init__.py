"""The additions of `engine.fast`, which need private names of SGLang (`private`): a client of its
schedulers, sessions, several processes, early imports, fixes and speed-ups.

Nothing outside this folder uses a private name of SGLang, and `plain.PlainEngine` needs none.
"""
