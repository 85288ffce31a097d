"""The rules that all voters compute alike: the ballot, the electorate, what signatures prove, the next head."""
