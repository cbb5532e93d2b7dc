"""The doctor: how well a drafter is accepted on a short sample, and which setting would be better."""

from foredraft.doctor.examination import Diagnosis, SettingTrial, diagnose

__all__ = ["Diagnosis", "SettingTrial", "diagnose"]
