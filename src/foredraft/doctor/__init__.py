"""The doctor: how well a drafter is accepted on a short sample, and which setting would be better."""

from foredraft.doctor.diagnosis import Diagnosis, Trial
from foredraft.doctor.examination import diagnose

__all__ = ["Diagnosis", "Trial", "diagnose"]
