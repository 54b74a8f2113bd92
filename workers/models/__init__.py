"""Models that come with Headrace. None is special: each is named in the configuration like anybody's own."""
