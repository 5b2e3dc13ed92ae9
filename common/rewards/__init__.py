"""Rewards and sample records: the names that train_ppo_vl.py imports."""

from common.rewards.judge import JudgeSettings, load_judgements, load_responses
from common.rewards.models import build as build_models
from common.rewards.records import sample_cards, sample_records, summarise
from common.rewards.scoring import RewardMix, load, prompts_with_spread
from common.rewards.transcripts import conversation_metrics
