"""Advantage estimators: from rewards to credit."""
