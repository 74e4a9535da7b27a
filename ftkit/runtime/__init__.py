"""What a trainer does around its step: the vote, healing, progress; all its threads live here."""
