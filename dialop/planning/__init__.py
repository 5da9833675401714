"""City planning, the "Planning" (itinerary) game of DialOp.

A user with preferences and a travel agent with a city's database agree on an ordered plan of sites.
The folder has the rules and texts, the search tool, instances (generated, stored, or from recorded
human games) and scripted players.
"""
