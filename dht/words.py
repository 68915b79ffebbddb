"""The 256 words that three-word names of peers are made of.

The order is part of the name of every peer: never move, replace or remove a word. All are short,
friendly English words, alphabetical, at most eight letters, so that a name fits a table cell and
can be read aloud.
"""

# fmt: off
WORDS: tuple[str, ...] = (
    "able", "acorn", "amber", "ample", "apple", "april", "arbor", "arrow",
    "aspen", "atlas", "august", "autumn", "bakery", "balsam", "banjo", "barley",
    "basil", "beach", "beacon", "berry", "birch", "bison", "blossom", "blue",
    "boat", "bold", "bonfire", "bonnet", "breeze", "brick", "bridge", "bright",
    "brisk", "bronze", "brook", "bubble", "bunny", "butter", "cabin", "calm",
    "candle", "canoe", "canvas", "carol", "castle", "cedar", "cello", "chalk",
    "cheer", "cherry", "chess", "chime", "cider", "cinder", "citrus", "clever",
    "cliff", "cloud", "clover", "coast", "cobalt", "cocoa", "comet", "copper",
    "coral", "cosmic", "cotton", "cozy", "crane", "creek", "crisp", "crystal",
    "curly", "cycle", "daisy", "dance", "dapple", "dawn", "deep", "delta",
    "dew", "dolphin", "dove", "dune", "eager", "eagle", "earth", "east",
    "echo", "elder", "elk", "elm", "ember", "emerald", "fair", "falcon",
    "feather", "fern", "fiddle", "finch", "fjord", "fleet", "flint", "flora",
    "flute", "foam", "forest", "fossil", "fox", "fresh", "frost", "galaxy",
    "garden", "gecko", "gentle", "ginger", "glacier", "glad", "glade", "glow",
    "golden", "goose", "grand", "grape", "green", "grove", "guitar", "gull",
    "harbor", "harp", "hazel", "hearth", "heather", "hedge", "heron", "hill",
    "honest", "honey", "hopper", "humble", "indigo", "island", "ivory", "ivy",
    "jade", "jasmine", "jolly", "juniper", "kayak", "keen", "kind", "kite",
    "koala", "lagoon", "lake", "lantern", "larch", "lark", "lemon", "lilac",
    "lily", "lively", "lotus", "lucky", "lunar", "lupine", "lynx", "magpie",
    "mango", "maple", "marble", "meadow", "mellow", "melon", "merry", "mint",
    "misty", "moon", "moose", "moss", "mountain", "nimble", "noble", "north",
    "nutmeg", "oak", "oasis", "ocean", "olive", "opal", "orange", "orchard",
    "otter", "owl", "pansy", "patient", "peach", "pearl", "pebble", "pepper",
    "piano", "pine", "planet", "plum", "polite", "pond", "poppy", "prairie",
    "puffin", "quail", "quartz", "quiet", "quill", "quilt", "rain", "raven",
    "reed", "ridge", "river", "robin", "rocket", "rowan", "ruby", "saffron",
    "sage", "sail", "salmon", "sandy", "shell", "silver", "sky", "snow",
    "solar", "sparrow", "spruce", "steady", "stone", "summer", "sunny", "swan",
    "swift", "tea", "thyme", "tidy", "tulip", "turtle", "valley", "velvet",
    "violet", "walnut", "warm", "willow", "winter", "wise", "wren", "yarrow",
)
# fmt: on
"""Exactly 256 different words, one for each value of a byte."""
