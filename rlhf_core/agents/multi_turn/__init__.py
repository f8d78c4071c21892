"""The loop of policy and environment, and how what an environment says becomes tokens behind the policy's."""
