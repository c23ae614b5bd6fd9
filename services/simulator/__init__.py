"""A cluster as discrete events: what it would do, by the policy that it runs."""
