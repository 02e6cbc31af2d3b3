"""Why a job hangs or a worker failed: pure rules, and the probes that read their facts."""
