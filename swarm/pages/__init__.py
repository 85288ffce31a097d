"""The pages of a run's data set: who keeps which, fetching them from each other, and having them before they are
needed."""
