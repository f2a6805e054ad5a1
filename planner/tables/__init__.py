"""What reports of all strategies share: tables of contenders, tables of seconds, finding both in a plan."""
