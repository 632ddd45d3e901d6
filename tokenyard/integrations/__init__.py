"""Where the library plugs into frameworks; each module needs its own."""
