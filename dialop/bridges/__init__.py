"""Games between this project and other libraries, each of which is an extra (docs/bridges.md).

Speaks of other libraries' environments and of this package's games. Never sees tokens, models or
`selfplay`. Each module imports one library and is loaded only by name.
"""
