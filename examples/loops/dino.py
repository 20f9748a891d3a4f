"""DINO: a student is to say of small crops what a teacher says of large ones; the teacher is the student's average."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import distribute


class Network(nn.Module):
    def __init__(self, out_dim=8):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out_dim))

    def forward(self, crops):
        return torch.cat([self.head(self.backbone(one)) for one in crops])


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops, student_temp=0.1, center_momentum=0.9):
        super().__init__()
        self.student_temp, self.ncrops, self.center_momentum = student_temp, ncrops, center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output, temp):
        student_out = (student_output / self.student_temp).chunk(self.ncrops)
        teacher_out = F.softmax((teacher_output - self.center) / temp, dim=-1).detach().chunk(2)
        total_loss, terms = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v != iq:
                    total_loss += torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
                    terms += 1
        self.update_center(teacher_output)
        return total_loss / terms

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True) / len(teacher_output)
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


def main(log=print):
    torch.manual_seed(0)
    images, out_dim, momentum_teacher = torch.randn(18, 1, 10, 10), 8, 0.95
    student = Network(out_dim)
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.requires_grad = False
    dino_loss = DINOLoss(out_dim, ncrops=4)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    student, optimizer = distribute(student, optimizer)
    for _ in range(2):
        for batch in images.split(6):
            crops = [batch, batch.flip(-1), batch[..., :7, :7], batch[..., 3:, 3:]]
            teacher_output = teacher(crops[:2])
            student_output = student(crops)
            loss = dino_loss(student_output, teacher_output, 0.07)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 0.3)
            optimizer.step()
            with torch.no_grad():
                for param_q, param_k in zip(student.parameters(), teacher.parameters()):
                    param_k.data.mul_(momentum_teacher).add_((1 - momentum_teacher) * param_q.detach().data)
            log(loss.item())
    log(sum(p.abs().sum().item() for p in teacher.parameters()))


if __name__ == "__main__":
    main()
