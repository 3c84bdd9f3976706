"""What an operator sees of a deployed environment, through the AWS API alone: status, logs."""
