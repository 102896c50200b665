"""Small callbacks, one job each. They write numbers through `LanguageModule.record`."""
